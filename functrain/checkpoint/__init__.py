"""Checkpoints: complete or absent, and restored bit for bit.

``python -m functrain.checkpoint DIRECTORY`` lists and verifies them.

Files:
  _checkpointer: the checkpoints of one training: writing, retention, and restoring
  _directory: a directory with one checkpoint per step: listing, reading the newest, cleaning up
  _checkpoint: one checkpoint, which is complete or not there
  _files: names of files, the order in which they are written, and access to a disk
  _object_store: the same access to an object store
  _writer: the thread that writes checkpoints
  _arrays: the arrays of a checkpoint, and their checksums
  _manifest: the JSON file with everything but the arrays
  _leaves: conversion between leaves of a state and stored arrays
  _processes: coordination of the processes of one run
  _watch: new checkpoints, for an evaluation in another process
  _warm_start: parts of a state from a checkpoint, or from files of other programs
  _selection: the leaves that a warm start takes, and where they are in the file
  _pieces: how a leaf is made of arrays in a file
  _rename: rules by which arrays in those files are leaves of a state, and back
  _layout: the order of the axes of an array in a file and in a state
  _sources: what is at a path, and its reader
  _safetensors: reader of safetensors, of one file or of several with an index
  _orbax: reader of Orbax checkpoints
  _array_files: readers of checkpoints, HDF5, and archives of Keras and of NumPy
  _errors: errors of checkpoints
"""
