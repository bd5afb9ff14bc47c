"""Annotations of a data set: parse trees and regions for each sample, beside its shards."""
