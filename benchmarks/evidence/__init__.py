"""The paper's claims about translation and images, at a size that two cores train."""
