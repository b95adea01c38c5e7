"""What the models of all families are made of."""
