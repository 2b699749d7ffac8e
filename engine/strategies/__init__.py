"""Where steps run: one file a family, all with the same few verbs."""
