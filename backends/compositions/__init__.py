"""Our backends: the engine composed with each attention, on each device."""
