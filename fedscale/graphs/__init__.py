"""Communication graphs and the mixing matrices built on them."""
