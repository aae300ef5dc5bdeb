"""One module per model type; each defines FAMILIES, a list of goldens.family.Family."""
