"""A projection and its adapter: one product, whose contracted axis goes on over the rank."""
