"""The seams, by the part of the trainer that they are in; `miles.drop_in.hosts` says which of them a host has."""
