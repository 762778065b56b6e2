//! The table of HTTP/1 conversations: those with news since the last look.

use std::{
    collections::{BTreeMap, BTreeSet},
    ptr::addr_of,
};

use aya::{
    Ebpf,
    maps::{Array, MapData},
};
use tuplewatch_common::{
    conversation::{Conversation, Head, Set},
    http::{self, Balancer},
    memory::{self, Set as Former},
};

use super::{clock, load::map_mut, shared::Shared};
use crate::core::observation::Talk;

/// The longest tick of a kernel (`CONFIG_HZ` of 100), in nanoseconds.
const TICK_NS: u64 = 10_000_000;

/// What the user side keeps of the table.
pub struct Talks {
    sets: Shared<Set>,
    heads: Shared<Head>,
    /// What was said before was told.
    told_ns: u64,
    /// The agent's start: what is known of a connection from before is when it was used, not when it was
    /// opened.
    started_ns: u64,
    /// Places of conversations whose latest response failed, and whose page it was: that they end is news.
    failing: BTreeMap<(u32, usize), (u64, Option<&'static Balancer>)>,
}

impl Talks {
    /// Opens the table.
    pub fn open(ebpf: &mut Ebpf) -> anyhow::Result<Self> {
        let now = clock::monotonic_ns();
        Ok(Self {
            sets: Shared::open(map_mut(ebpf, "TALKS")?)?,
            heads: Shared::open(map_mut(ebpf, "HEADS")?)?,
            told_ns: now,
            started_ns: now,
            failing: BTreeMap::new(),
        })
    }

    /// Conversations with news since the last call.
    ///
    /// # Errors
    /// The error of a system call on a map.
    pub fn look(&mut self, ebpf: &Ebpf) -> anyhow::Result<Vec<Talk>> {
        let now = clock::monotonic_ns();
        let mut places: BTreeSet<(u32, usize)> = self.failing.keys().copied().collect();
        for number in 0..self.sets.len() {
            let set = self.sets.at(number).cast::<Conversation>();
            for way in 0..size_of::<Set>() / size_of::<Conversation>() {
                // SAFETY: a place of the set; it is valid and aligned.
                let last = unsafe { addr_of!((*set.add(way)).last_ns).read_volatile() };
                if last >= self.told_ns {
                    places.insert((number, way));
                }
            }
        }
        // The kernel side takes the time of the latest tick, which may lie so much behind.
        self.told_ns = now.saturating_sub(TICK_NS);
        let memory: Array<&MapData, Former> = ebpf
            .map("MEMORY")
            .ok_or_else(|| anyhow::anyhow!("the eBPF object has no map MEMORY"))?
            .try_into()?;
        let mut talks = Vec::with_capacity(places.len());
        for place in places {
            let set = self.sets.at(place.0).cast::<Conversation>();
            // SAFETY: as above; any bytes are a conversation.
            let mut conversation = unsafe { set.add(place.1).read_volatile() };
            if conversation.opened_ns < self.started_ns {
                conversation.opened_ns = 0;
            }
            talks.push(self.talk(place, conversation, &memory)?);
        }
        Ok(talks)
    }

    fn talk(
        &mut self,
        place: (u32, usize),
        conversation: Conversation,
        memory: &Array<&MapData, Former>,
    ) -> anyhow::Result<Talk> {
        let hash = conversation.hash;
        let before = self.failing.remove(&place).filter(|(h, _)| *h == hash);
        let mut talk = Talk {
            conversation,
            page: before.and_then(|(_, page)| page),
            closed: false,
        };
        if !conversation.is_failing() {
            return Ok(talk);
        }
        if let Some(page) = self.page(hash) {
            talk.page = page;
        }
        let former = memory.get(&(hash as u32 & (memory.len() - 1)), 0)?;
        let word = memory::find(&former, hash);
        talk.closed = word.is_some_and(|word| word.state().is_closed());
        if !talk.closed {
            self.failing.insert(place, (hash, talk.page));
        }
        Ok(talk)
    }

    /// Whose page the latest failure on a connection was; `None` if another connection's has come over
    /// it.
    fn page(&self, hash: u64) -> Option<Option<&'static Balancer>> {
        let head = self.heads.get(hash as u32 & (self.heads.len() - 1));
        (head.hash == hash).then(|| {
            let len = usize::try_from(head.len).unwrap_or(usize::MAX);
            http::page(&head.bytes[..len.min(head.bytes.len())])
        })
    }
}
