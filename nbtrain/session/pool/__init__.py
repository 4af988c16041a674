"""The notebook's ranks: started, kept, replaced, ended."""
