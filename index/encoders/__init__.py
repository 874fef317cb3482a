"""Encoders of images and texts on onnxruntime, with preprocessing. Start with `index.encoders.encoder`."""
