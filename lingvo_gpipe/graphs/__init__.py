"""FLOPs and memory that are read from TensorFlow's traced graphs.

Formulas that need no trace are in `lingvo_gpipe.network`; nothing here knows layers or cells.
"""
