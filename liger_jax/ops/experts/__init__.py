"""Mixtures of experts: routers, grouped products, and feed-forwards of experts on one device or several."""
