"""Group normalisation (Wu and He, 2018)."""
