"""Records of tf.train.Examples in shards: their index, checksums, features and layout."""
