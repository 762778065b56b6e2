//! Writes BTF from a text with one type a line, so that tests can describe kernels that cannot be booted.
//!
//! ```text
//! 1 int u32 4                    id, kind, name (- for none), size
//! 2 ptr 0                        pointer to void (type 0)
//! 3 const 2                      also volatile, and `typedef name 2`
//! 4 array 1 16                   element, count
//! 5 struct sock_common 136       also union; its members follow, indented:
//!   skc_daddr 1 0                  name, type, offset in bits
//!   skc_ipv6only 1 157 1           and width in bits of a bitfield
//! 6 enum state 4                   enumerators follow: name value
//! 7 proto 0 2 3                  return type, parameter types
//! 8 func tcp_v4_connect 7
//! ```

use std::collections::HashMap;

/// The BTF (little-endian) that `text` describes. Panics on a text that is wrong.
pub fn write_btf(text: &str) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.string("");
    let mut lines = text
        .lines()
        .filter(|l| !l.trim().is_empty() && !l.starts_with('#'))
        .peekable();
    while let Some(line) = lines.next() {
        let mut members = Vec::new();
        while let Some(member) = lines.next_if(|l| l.starts_with(' ')) {
            members.push(member.split_whitespace().collect());
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        writer.add(&words, &members);
    }
    writer.finish()
}

#[derive(Default)]
struct Writer {
    types: Vec<u8>,
    strings: Vec<u8>,
    known: HashMap<String, u32>,
    count: u32,
}

fn number(word: &str) -> u32 {
    word.parse()
        .unwrap_or_else(|_| panic!("`{word}` is no number"))
}

impl Writer {
    fn string(&mut self, text: &str) -> u32 {
        let text = if text == "-" { "" } else { text };
        if let Some(offset) = self.known.get(text) {
            return *offset;
        }
        let offset = u32::try_from(self.strings.len()).expect("short strings");
        self.strings.extend_from_slice(text.as_bytes());
        self.strings.push(0);
        self.known.insert(text.to_owned(), offset);
        offset
    }

    fn put(&mut self, words: &[u32]) {
        for word in words {
            self.types.extend_from_slice(&word.to_le_bytes());
        }
    }

    fn add(&mut self, words: &[&str], members: &[Vec<&str>]) {
        self.count += 1;
        assert_eq!(
            number(words[0]),
            self.count,
            "ids count up from 1: {words:?}"
        );
        let count = u32::try_from(members.len()).expect("few members");
        let info = |kind: u32, vlen: u32, flag: bool| kind << 24 | vlen | u32::from(flag) << 31;
        match words[1] {
            "int" => {
                let name = self.string(words[2]);
                let size = number(words[3]);
                self.put(&[name, info(1, 0, false), size, size * 8]);
            }
            "ptr" => self.put(&[0, info(2, 0, false), number(words[2])]),
            "array" => {
                let element = number(words[2]);
                self.put(&[0, info(3, 0, false), 0, element, element, number(words[3])]);
            }
            kind @ ("struct" | "union") => {
                let kind = if kind == "struct" { 4 } else { 5 };
                let name = self.string(words[2]);
                let flag = members.iter().any(|m| m.len() > 3);
                self.put(&[name, info(kind, count, flag), number(words[3])]);
                for member in members {
                    let name = self.string(member[0]);
                    let width = member.get(3).map_or(0, |w| number(w));
                    self.put(&[name, number(member[1]), number(member[2]) | width << 24]);
                }
            }
            "enum" => {
                let name = self.string(words[2]);
                self.put(&[name, info(6, count, false), number(words[3])]);
                for member in members {
                    let name = self.string(member[0]);
                    self.put(&[name, number(member[1])]);
                }
            }
            "fwd" => {
                let name = self.string(words[2]);
                self.put(&[name, info(7, 0, false), 0]);
            }
            "typedef" => {
                let name = self.string(words[2]);
                self.put(&[name, info(8, 0, false), number(words[3])]);
            }
            "volatile" => self.put(&[0, info(9, 0, false), number(words[2])]),
            "const" => self.put(&[0, info(10, 0, false), number(words[2])]),
            "func" => {
                let name = self.string(words[2]);
                self.put(&[name, info(12, 1, false), number(words[3])]);
            }
            "proto" => {
                let count = u32::try_from(words.len() - 3).expect("few parameters");
                self.put(&[0, info(13, count, false), number(words[2])]);
                for parameter in &words[3..] {
                    let (name, ty) = parameter.split_once(':').unwrap_or(("-", parameter));
                    let name = self.string(name);
                    self.put(&[name, number(ty)]);
                }
            }
            other => panic!("unknown kind `{other}`"),
        }
    }

    fn finish(self) -> Vec<u8> {
        let length = |part: &[u8]| u32::try_from(part.len()).expect("small data");
        let (types, strings) = (length(&self.types), length(&self.strings));
        // struct btf_header: magic, version, flags, hdr_len, type_off, type_len, str_off, str_len.
        let mut data = vec![0x9f, 0xeb, 1, 0];
        for word in [24, 0, types, types, strings] {
            data.extend_from_slice(&u32::to_le_bytes(word));
        }
        data.extend_from_slice(&self.types);
        data.extend_from_slice(&self.strings);
        data
    }
}
