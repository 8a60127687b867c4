"""The shape of drafted trees: which candidates a tree holds."""
