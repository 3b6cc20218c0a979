"""Vision towers: prepared images to rows that replace embeddings of the text model."""
