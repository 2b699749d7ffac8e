"""Tables of CSV and Parquet files: columns by name, their types, fitted preprocessing. Runs on the host."""
