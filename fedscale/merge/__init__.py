"""How a client's payload and those of its neighbours become one payload."""
