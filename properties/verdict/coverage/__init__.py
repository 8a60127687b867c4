"""Coverage by pairs: what judged requests had, what their runs reached, and which two met."""
