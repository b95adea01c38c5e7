"""Products of rows with the weight of their group: the experts of a mixture."""
