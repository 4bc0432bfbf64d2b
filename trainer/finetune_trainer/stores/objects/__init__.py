"""Object stores: buckets of S3, Azure and Google, and files over HTTPS."""
