"""Golden checkpoints: tiny models of every family, recorded runs and float64 recomputations."""
