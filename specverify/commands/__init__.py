"""The commands of the command line: options, arguments, and the calls they make."""
