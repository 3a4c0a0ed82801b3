"""lingvo_gpipe: pipeline-parallel training of networks larger than a device, in TensorFlow."""
