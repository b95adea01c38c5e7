"""How a model is sharded over a mesh: its parameters, its optimizer state, and what each device computes of it."""
