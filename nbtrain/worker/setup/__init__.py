"""How what a cell trains is found and handed to the strategy."""
