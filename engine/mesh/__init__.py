"""How replicas are laid out, data x model: the mesh, its collectives, which replica holds which shard of a variable."""
