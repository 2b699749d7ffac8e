"""Tables of CSV and Parquet files: columns, their types, fitted preprocessing. Runs on the host."""
