"""How a communicator comes about: what its ranks agree on, and the memory that they share."""
