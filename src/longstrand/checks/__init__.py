"""What must be equal on a user's own model and data: ranks and one process, packs and documents, tiles, levers, resume."""
