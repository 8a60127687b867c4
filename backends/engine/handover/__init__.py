"""The hand-over of a request between servers: its packet, and its checks."""
