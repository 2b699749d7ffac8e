"""The mesh of replicas, data x model, its collectives and shards. Runs on the host, except what says "Replica code"."""
