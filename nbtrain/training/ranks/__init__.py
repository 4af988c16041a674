"""What ranks say to each other in a cell, and what is the same on all of them."""
