"""What other trainers' interfaces need of this library: one module for each, which imports that trainer nowhere."""
