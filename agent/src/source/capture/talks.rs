//! HTTP/1 conversations of a capture: bounded, and which of them are to be told at the next look.

use std::collections::{BTreeSet, HashMap};

use foldhash::fast::RandomState;
use tuplewatch_common::{conversation::Conversation, http::Balancer};

use crate::core::observation::Talk;

/// Conversations kept; when they are too many, those that were quiet for longest go.
const MOST: usize = 1 << 16;

/// The conversations.
#[derive(Default)]
pub struct Talks {
    all: HashMap<u64, Entry, RandomState>,
    /// Those with news since the last look.
    changed: BTreeSet<u64>,
    /// Those whose latest response failed: their end is news.
    failing: BTreeSet<u64>,
    /// Those with a request that waits: if they end without an answer, that is news too.
    waiting: BTreeSet<u64>,
}

#[derive(Default)]
struct Entry {
    conversation: Conversation,
    page: Option<&'static Balancer>,
}

impl Talks {
    /// The conversation on the connection with that hash; whoever asks changes it.
    pub fn get(&mut self, hash: u64) -> Option<&mut Conversation> {
        let entry = self.all.get_mut(&hash)?;
        self.changed.insert(hash);
        Some(&mut entry.conversation)
    }

    /// A new one. `None` if all places are taken by those whose requests fail.
    pub fn add(&mut self, hash: u64) -> Option<&mut Conversation> {
        if self.all.len() >= MOST {
            self.make_room();
            if self.all.len() >= MOST {
                return None;
            }
        }
        self.changed.insert(hash);
        let entry = self.all.entry(hash).or_default();
        *entry = Entry::default();
        Some(&mut entry.conversation)
    }

    /// A response failed; `page` is whose error page it is, if it is a known one.
    pub fn failed(&mut self, hash: u64, page: Option<&'static Balancer>) {
        if let Some(entry) = self.all.get_mut(&hash) {
            entry.page = page;
            self.failing.insert(hash);
        }
    }

    /// What is new since the last look, in the order of the connections. `closed` says whether the
    /// connection with a hash is over.
    pub fn look(&mut self, mut closed: impl FnMut(u64) -> bool) -> Vec<Talk> {
        let mut hashes = std::mem::take(&mut self.changed);
        hashes.extend(&self.failing);
        hashes.extend(self.waiting.iter().filter(|hash| closed(**hash)));
        let mut talks = Vec::with_capacity(hashes.len());
        for hash in hashes {
            let Some(entry) = self.all.get(&hash) else {
                self.failing.remove(&hash);
                self.waiting.remove(&hash);
                continue;
            };
            let closed = closed(hash);
            if closed || !entry.conversation.is_failing() {
                self.failing.remove(&hash);
            }
            if closed || entry.conversation.waiting == 0 {
                self.waiting.remove(&hash);
            } else {
                self.waiting.insert(hash);
            }
            talks.push(Talk {
                conversation: entry.conversation,
                page: entry.page,
                closed,
            });
        }
        talks.sort_unstable_by_key(|talk| talk.conversation.tuple);
        talks
    }

    /// The quarter that was quiet for longest goes, but for those whose requests fail.
    fn make_room(&mut self) {
        let mut quiet: Vec<(u64, u64)> = self
            .all
            .iter()
            .filter(|(_, entry)| !entry.conversation.is_failing())
            .map(|(hash, entry)| (entry.conversation.last_ns, *hash))
            .collect();
        quiet.sort_unstable();
        for (_, hash) in quiet.into_iter().take(MOST / 4) {
            self.all.remove(&hash);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_fail_stay_when_room_is_needed() {
        let mut talks = Talks::default();
        for hash in 0..MOST as u64 {
            let c = talks.add(hash).unwrap();
            c.on_request(1, 1, hash);
            if hash < 10 {
                c.on_response(503, 1, hash);
            }
        }
        talks.look(|_| false);
        assert!(talks.add(MOST as u64).is_some());
        assert_eq!(talks.all.len(), MOST - MOST / 4 + 1);
        assert!((0..10).all(|hash| talks.all.contains_key(&hash)));
        assert!(!talks.all.contains_key(&10) && talks.all.contains_key(&(MOST as u64 - 1)));
    }

    #[test]
    fn the_end_of_a_failing_one_is_told_once() {
        let mut talks = Talks::default();
        let c = talks.add(7).unwrap();
        c.on_request(1, 1, 1);
        c.on_response(503, 1, 1);
        talks.failed(7, None);
        assert_eq!(talks.look(|_| false).len(), 1);
        assert_eq!(talks.look(|_| false).len(), 1, "it may be over");
        assert!(talks.look(|_| true)[0].closed);
        assert!(talks.look(|_| true).is_empty());
    }
}
