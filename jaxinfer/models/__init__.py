"""The decoder, the families it covers, and the loading of its weights."""
