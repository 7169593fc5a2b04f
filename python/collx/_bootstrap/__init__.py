"""Creates communicators: the agreement between the ranks, and the memory that they share."""
