"""Range checks of a recipe's keys. Components check their arguments."""
