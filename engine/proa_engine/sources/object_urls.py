"""URLs of object stores. Apart from `object_store`, whose library most starts do not need."""

STORES = {  # by scheme
    "s3": "S3",
    "s3a": "S3",
    "gs": "Google Cloud Storage",
    "az": "Azure Blob Storage",
    "abfs": "Azure Blob Storage",
    "abfss": "Azure Blob Storage",
}


def store_of(url: str) -> str | None:
    """The store of a URL; None for other texts."""
    scheme, separator, _ = url.partition("://")
    return STORES.get(scheme.lower()) if separator else None
