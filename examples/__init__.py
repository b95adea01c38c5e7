"""Short programs that train with liger_jax."""
