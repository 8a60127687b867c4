"""The server that launches a step before the host has seen the last one."""
