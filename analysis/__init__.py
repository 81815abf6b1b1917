"""Tables and figures made from the Parquet records alone."""
