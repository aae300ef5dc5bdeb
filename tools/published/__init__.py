"""Published routers and defaults of every family, from transformers' configuration classes."""
