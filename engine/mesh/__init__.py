"""How replicas are laid out, data x model: the mesh, its collectives, which replica holds which part of a variable."""
