"""What must be equal on a user's own model and data: ranks, packs, tiles, levers, a resumed run."""
