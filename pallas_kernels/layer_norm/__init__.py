"""Layer normalisation (Ba, Kiros and Hinton, 2016)."""
