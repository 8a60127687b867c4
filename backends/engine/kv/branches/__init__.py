"""Several branch caches of one request at once."""
