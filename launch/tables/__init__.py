"""What `mode=export` writes of tables of embeddings. Runs on the host."""
