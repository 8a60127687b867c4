"""The server's overlap: a step is launched before the host has seen the results of the last one."""
