"""Pure tensor functions, one folder each: definition, portable form, cases. Nothing here communicates."""
