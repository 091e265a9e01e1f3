"""MorphKV: a cache of constant size; the attention of recent tokens decides what it keeps."""
