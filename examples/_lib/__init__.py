"""What the programs of the examples share: flags, text, checkpoints, pictures and how errors end them."""
