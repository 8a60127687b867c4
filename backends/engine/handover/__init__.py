"""The hand-over of a request from one server to another: its packet, and what both sides check."""
